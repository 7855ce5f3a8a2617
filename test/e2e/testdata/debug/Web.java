import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;

/** Answers with what its pod greets with. */
class Web {
    public static void main(String[] args) throws Exception {
        var address = new InetSocketAddress("127.0.0.1", Integer.parseInt(System.getenv("PORT")));
        var server = HttpServer.create(address, 0);
        server.createContext("/", exchange -> {
            String greeting = System.getenv("GREETING");
            byte[] answer = ("java: " + greeting).getBytes(); // break here
            exchange.sendResponseHeaders(200, answer.length);
            exchange.getResponseBody().write(answer);
            exchange.close();
        });
        server.start();
        System.out.println("serving " + address);
    }
}
