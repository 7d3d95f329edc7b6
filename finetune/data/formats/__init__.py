"""What the columns of a row mean."""
