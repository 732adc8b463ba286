"""How far each contender moves a model from timm's own result.

survey (run, compare; rounding) -> report (words, table, files) -> plots
"""

FILES = ("report.json", "report.md", "report.html")
