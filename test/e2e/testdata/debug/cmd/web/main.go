// Command web answers with what its pod greets with.
package main

import (
	"fmt"
	"net/http"
	"os"
)

func main() {
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		greeting := os.Getenv("GREETING")
		fmt.Fprint(w, "go: ", greeting) // break here
	})
	address := "127.0.0.1:" + os.Getenv("PORT")
	fmt.Println("serving", address)
	fmt.Println(http.ListenAndServe(address, nil))
}
