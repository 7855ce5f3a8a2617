// Answers with what its pod greets with.
const http = require('node:http');

http.createServer((request, response) => {
  const greeting = process.env.GREETING;
  response.end(`node: ${greeting}`); // break here
}).listen(process.env.PORT, '127.0.0.1', () => console.log('serving', process.env.PORT));
