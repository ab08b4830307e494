"""Many command lines of one command."""

from tests.fork_server import fork_server


def run_many(name, folder, command_lines):
    """(status, output, error) of `bin/<name>` with each command line, run in `folder`."""
    done = [fork_server().run(name, *flags, cwd=folder, timeout=600) for flags in command_lines]
    return [(each.returncode, each.stdout, each.stderr) for each in done]
