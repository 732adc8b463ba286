"""How far each strategy moves a model from timm's own result: inputs, measurement, report."""

from .inputs import ImageFolder, load_model
from .measure import Drift, measure
from .report import print_table, track, write_json

__all__ = ["Drift", "ImageFolder", "load_model", "measure", "print_table", "track", "write_json"]
