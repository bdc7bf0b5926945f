# SPDX-License-Identifier: Apache-2.0
"""``tiercel bench model``: whole Hugging Face models with random weights, with and without us.

`configs/` has the sizes of published models. Each way of running a model is measured in the same
process, one after the other.
"""

PHASES = ("prefill", "decode", "train")

# In the order in which they run: liger changes transformers itself, which nothing undoes.
WAYS = ("transformers", "transformers.compiled", "tiercel", "tiercel.compiled", "engine", "liger")
