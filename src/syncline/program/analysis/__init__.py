"""What a program costs and how long it takes, by formula and by simulation."""
