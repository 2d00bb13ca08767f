from rowcast.prefetcher.cli import app

app(prog_name="prefetcher")
