"""The processes of a job: how they find each other, are watched, and end."""
