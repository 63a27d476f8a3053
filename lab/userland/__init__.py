"""Programs and libraries that the stub packages install into a lab host."""
