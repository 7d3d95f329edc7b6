"""Images: what a row's column may hold, and how encoded bytes become pixels."""
