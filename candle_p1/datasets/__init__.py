"""Making and fetching data files."""
