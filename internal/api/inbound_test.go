package api

import (
	"encoding/json"
	"testing"
)

func TestInboundReadsWhatItWrites(t *testing.T) {
	for text, want := range map[string]string{
		`"8080"`: `"8080"`, `"8080/tcp"`: `"8080"`, `"53/udp"`: `"53/udp"`, `"all"`: `"all"`, `"65535"`: `"65535"`,
		`"0"`: "", `"65536"`: "", `"-1"`: "", `"8080/sctp"`: "", `""`: "", `"http"`: "", `"80 81"`: "", `"*"`: "", `"All"`: "", `8080`: "",
	} {
		var i Inbound
		err := json.Unmarshal([]byte(text), &i)
		if want == "" {
			if err == nil || i != (Inbound{}) {
				t.Errorf("%s was read as %v", text, i)
			}
			continue
		}
		if got, _ := json.Marshal(i); err != nil || string(got) != want {
			t.Errorf("%s became %s, %v; want %s", text, got, err, want)
		}
	}
}
