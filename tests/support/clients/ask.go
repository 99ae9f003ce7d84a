package main

// Go's HTTP client with a body that it streams in chunks, and a timeout of 292 years.

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"
)

func main() {
	client := &http.Client{Timeout: 1<<63 - 1}
	for i := 0; i < 3; i++ {
		reader, writer := io.Pipe()
		go func() {
			for _, part := range strings.SplitAfter(os.Args[2], ",") {
				io.WriteString(writer, part)
				time.Sleep(time.Millisecond)
			}
			writer.Close()
		}()
		response, err := client.Post(os.Args[1], "application/json", reader)
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		body, _ := io.ReadAll(response.Body)
		response.Body.Close()
		fmt.Println(response.StatusCode, string(body))
	}
}
