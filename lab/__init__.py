"""The simulated host: a systemd container that looks like the target, and the mirrors around it."""
