"""The command line, and the only place that builds the object graph."""
