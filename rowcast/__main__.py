import os
import sys

from rowcast.runtime.stops import hold

HERE = os.getcwd()


def main() -> None:
    hold()  # before the imports, which take a second
    if not (sys.flags.safe_path or __file__.startswith(f"{HERE}/")) and sys.path[0] == HERE:
        del sys.path[0]  # `python -m` searches the working folder first, which may be somebody's run
    from rowcast.command_line.rowcast import app

    app(prog_name="rowcast")


if __name__ == "__main__":
    main()
