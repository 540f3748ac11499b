"""With this folder on PYTHONPATH, a process finds none of the packages that the light installation leaves out."""

import importlib.machinery
import sys

LEFT_OUT = ("seqio", "tensorflow", "tensorflow_datasets", "tensorflow_text")


class Finder(importlib.machinery.PathFinder):
    """Finds all other packages."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in LEFT_OUT:
            return super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
