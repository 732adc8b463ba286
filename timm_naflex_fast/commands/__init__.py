"""All that measures, records and prints. Nothing of the plugin imports it."""
