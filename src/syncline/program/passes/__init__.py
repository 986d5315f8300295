"""One option, one pass, one file: a pass is a pure function `Program -> Program`.

A pass knows the actions and nothing of arguments, models or devices. `program/build.py` decides which passes a strategy
needs.
"""
