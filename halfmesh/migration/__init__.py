"""From other engines to halfmesh: their configs (`halfmesh convert-config`), and Colossal-AI's names (`colossalai.py`)."""
