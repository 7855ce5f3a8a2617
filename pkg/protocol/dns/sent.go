package dns

import (
	"encoding/binary"
	"hash/maphash"
	"math/rand/v2"
	"sync"
)

// sentSet holds the queries that wait for an upstream, to detect a query that comes back as a client's and would
// loop forever. A client's query with the same question and ID at the same time is a false positive, with
// probability 1/65536.
type sentSet struct {
	mu   sync.Mutex
	seed maphash.Seed
	keys map[sentKey]int
}

type sentKey struct {
	id       uint16
	question uint64
}

// add copies the query, gives the copy a random ID and remembers it until done is called.
func (s *sentSet) add(query []byte, end int) (sent []byte, done func()) {
	sent = append(make([]byte, 0, len(query)), query...)
	binary.BigEndian.PutUint16(sent, uint16(rand.Uint32())) // ChaCha8, seeded by the operating system
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keys == nil {
		s.keys = make(map[sentKey]int)
		s.seed = maphash.MakeSeed()
	}
	key := s.key(sent, end)
	s.keys[key]++
	return sent, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.keys[key]--; s.keys[key] == 0 {
			delete(s.keys, key)
		}
	}
}

// has reports whether the query waits for an upstream.
func (s *sentSet) has(query []byte, end int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.keys) == 0 {
		return false
	}
	return s.keys[s.key(query, end)] > 0
}

func (s *sentSet) key(m []byte, end int) sentKey {
	return sentKey{id: binary.BigEndian.Uint16(m), question: maphash.Bytes(s.seed, m[headerLen:end])}
}
