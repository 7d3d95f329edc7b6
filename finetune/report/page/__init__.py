"""report.html: a run as one page that needs no network."""
