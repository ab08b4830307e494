"""Times contenders in turns, in this process or in others."""

import json
import subprocess
import time


def time_call(function, *arguments, **options):
    """Return a call's result, its wall seconds and its CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function(*arguments, **options)
    return result, time.perf_counter() - wall, time.process_time() - cpu


def in_turns(contenders, rounds):
    """Call each contender once a round, another one first each time.

    Args:
        contenders: Functions without arguments, by name.
        rounds: How many rounds.

    Returns:
        The results of each round, by name.
    """
    names, results = list(contenders), {name: [] for name in contenders}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            results[name].append(contenders[name]())
    return results


class Peer:
    """A process that answers each line of its input with a line of JSON.

    Args:
        command: What to start.
    """

    def __init__(self, command):
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line):
        """Send a line, and return the answer."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        """End the process."""
        self.process.communicate()
