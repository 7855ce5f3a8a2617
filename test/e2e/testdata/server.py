"""A service in Python, as somebody edits it: each answer says what the source said when the program began."""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GREETING = "original"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"name": GREETING + " of " + os.uname().nodename}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer(("", 8080), Handler).serve_forever()
