"""Answers with what its pod greets with."""
import http.server
import os


class Web(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        greeting = os.environ["GREETING"]
        self.send_response(200)  # break here
        self.end_headers()
        self.wfile.write(f"python: {greeting}".encode())


with http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Web) as server:
    print("serving", server.server_address, flush=True)
    server.serve_forever()
