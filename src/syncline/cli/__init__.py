"""The commands of `syncline`: what was typed -> calls. Nothing heavy is imported until a command runs."""
