"""The inference role: served versions side by side, one shared backbone forward a group."""
