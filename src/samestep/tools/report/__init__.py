"""`samestep report`: one self-contained HTML file about one or several runs. Does not import torch."""
