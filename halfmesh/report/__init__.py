"""What a run was: the folder that keeps it, and the page that shows it."""
