"""How far each strategy moves a model from timm's own result: inputs, measurement, data, renderings."""

from .data import Report
from .inputs import ImageFolder, NaFlexImages, load_model
from .measure import Drift, Survey, measure, survey
from .report import print_table, track, write_json

__all__ = [
    "Drift",
    "ImageFolder",
    "NaFlexImages",
    "Report",
    "Survey",
    "load_model",
    "measure",
    "print_table",
    "survey",
    "track",
    "write_json",
]
