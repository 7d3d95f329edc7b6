"""A run at a URL: downloaded when it starts, uploaded while it trains."""
