"""`calm quickstart`: train and compare small models in 15 minutes on two cores, from raw text to a report."""
