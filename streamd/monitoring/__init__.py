"""What the daemon tells of itself: statistics, metrics, pictures, systemd."""
