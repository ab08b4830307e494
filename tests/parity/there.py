"""What the scripts share that run in the environments of other libraries; imports neither tfdml nor
the tests."""

import json

import numpy as np


def run_cases(cases_path, batches_path, values_path, run, **more):
    """Write what `run(case, batch, batches)` finds of each case on each of its batches, as
    "index|batch|what".

    What the library raises is part of what is compared: it is under "index|batch|error".
    """
    batches = np.load(batches_path)
    with open(cases_path) as file:
        cases = json.load(file)
    values = dict(more)
    for index, case in enumerate(cases):
        for batch in case["batches"]:
            try:
                found = run(case, batch, batches)
            except Exception as error:
                found = {"error": np.array(f"{type(error).__name__}: {error}"[:300])}
            values.update({f"{index}|{batch}|{key}": value for key, value in found.items()})
    np.savez(values_path, **values)
