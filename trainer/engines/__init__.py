"""Engines: what runs forward, backward and the update of a model that is spread over ranks."""
