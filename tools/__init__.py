"""What only documents need: generated pages, and the commands that write and check them."""
