"""Where clients compute: one after another, a whole cohort at once, shared out over processes."""
