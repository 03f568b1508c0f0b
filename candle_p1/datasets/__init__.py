"""Getting data sets: fetching the published files, and making synthetic ones."""
