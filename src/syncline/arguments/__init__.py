"""Every option of Syncline: its name, its literal documentation, and how it is read from files and command lines."""

from syncline.arguments.help import help_text
from syncline.arguments.loading import arguments_from_mapping, load_arguments, resolved_yaml
from syncline.arguments.training_arguments import OPTIONS, TrainingArguments

__all__ = ["OPTIONS", "TrainingArguments", "arguments_from_mapping", "help_text", "load_arguments", "resolved_yaml"]
