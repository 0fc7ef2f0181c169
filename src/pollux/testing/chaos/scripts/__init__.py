"""Programs that jobs of a campaign run. Nobody imports them: they are handed to `pollux submit` by their paths."""
