"""A layout proven on the user's own model: runs of a reference and of the layout, compared tensor by tensor."""
