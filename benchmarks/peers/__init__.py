"""The trainers of `side_by_side.py`: one file per library, each with a function `start(rank, **options)`.

`catalogue.py` names them, `environment.py` installs what they need, `processes.py` runs and asks them, `host.py` is
what runs in their processes.
"""
