"""The figures of a report: each a small function that draws some series of an experiment."""
