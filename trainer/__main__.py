from rowcast.trainer.cli import app

app(prog_name="trainer")
