"""A static page that runs an artifact in the browser."""
