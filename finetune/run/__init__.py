"""One RunConfig becomes parts, the parts are trained, the model is exported: the one place where all wings meet."""
