"""What each command of `syncline` does. A module is imported only when its command runs."""
