package transport_test

import (
	"fmt"
	"io"
	"net/netip"
	"testing"
	"time"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/transport"
	"kubevpn/pkg/wire/transport/transporttest"
)

func TestStreamCountsWhatItsUserWritesAndReads(t *testing.T) {
	laptop, manager := transporttest.Pair(t)
	near, far := open(t, laptop, manager)
	if _, err := near.Write(make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, func() error {
		if st := far.Stats(); st.Unread != 1000 || st.Received != 0 {
			return fmt.Errorf("before the read: %+v", st)
		}
		return nil
	})
	if _, err := io.ReadFull(far, make([]byte, 600)); err != nil {
		t.Fatal(err)
	}
	if st := far.Stats(); st.Received != 600 || st.Unread != 400 {
		t.Errorf("after Read: %+v", st)
	}
	near.CloseWrite()
	if n, err := far.WriteTo(io.Discard); n != 400 || err != nil {
		t.Fatal(n, err)
	}
	if st := far.Stats(); st.Received != 1000 || st.Unread != 0 {
		t.Errorf("after WriteTo: %+v", st)
	}
	if st := near.Stats(); st.Sent != 1000 || st.Blocked || !st.Attached || st.Path != 0 {
		t.Errorf("the writer: %+v", st)
	}
}

func TestStreamIsBlockedWhileTheOtherEndDoesNotRead(t *testing.T) {
	laptop, manager := transporttest.Pair(t)
	near, far := open(t, laptop, manager)
	const much = 32 << 20
	done := make(chan error, 1)
	go func() {
		_, err := near.Write(make([]byte, much))
		done <- err
	}()
	testenv.Eventually(t, time.Minute, func() error {
		if st := near.Stats(); !st.Blocked || st.Sent == 0 || st.Sent >= much {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
	if _, err := io.CopyN(io.Discard, far, much); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if st := near.Stats(); st.Blocked || st.Sent != much {
		t.Errorf("after all was read: %+v", st)
	}
}

func TestPacketsCountTheirPayload(t *testing.T) {
	laptop, manager := transporttest.Pair(t)
	near, err := laptop.OpenPackets(t.Context(), transport.Request{Proto: transport.ProtoUDP,
		Dst: netip.MustParseAddrPort("10.96.0.10:53")})
	if err != nil {
		t.Fatal(err)
	}
	in, err := manager.Accept(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	far, err := in.AcceptPackets()
	if err != nil {
		t.Fatal(err)
	}
	if err := near.WritePacket(make([]byte, 70)); err != nil {
		t.Fatal(err)
	}
	if n, err := near.TryWritePackets(make([]byte, 60), 40); n != 2 || err != nil {
		t.Fatal(n, err)
	}
	for range 3 {
		if _, err := far.ReadPacket(make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
	}
	if near.Stats().Sent != 130 || far.Stats().Received != 130 {
		t.Errorf("sent %+v, received %+v", near.Stats(), far.Stats())
	}
}
