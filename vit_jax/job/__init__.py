"""The processes of a job: how they connect, how they are watched, and how they end."""
