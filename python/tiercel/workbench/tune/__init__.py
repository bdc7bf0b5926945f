# SPDX-License-Identifier: Apache-2.0
"""``tiercel tune``: which configuration is the fastest for a problem, measured here.

A sweep is a list of trials: a candidate on a problem with a number of tokens. Workers (a GPU each)
take batches of trials from a board, check each candidate's answer, time it and publish the result;
at last the fastest of each problem are timed once more, in turn. A journal makes it resumable.
"""


class TuneError(Exception):
    """An error of the user's that keeps the tuner from running."""
