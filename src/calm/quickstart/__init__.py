"""`calm quickstart`: the whole idea in a quarter of an hour on two cores, from a text to a report."""
