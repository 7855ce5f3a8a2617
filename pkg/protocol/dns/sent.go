package dns

import (
	"encoding/binary"
	"hash/maphash"
	"math/rand/v2"
	"sync"
)

// sentSet holds the queries that wait for an upstream, to detect a query that comes back as a client's and would
// loop forever. A client may ask the same question with the same ID by chance, so one return proves nothing: a query
// loops if it comes back with both of the random IDs that it was sent with.
type sentSet struct {
	mu   sync.Mutex
	seed maphash.Seed
	keys map[sentKey]int
}

type sentKey struct {
	id       uint16
	question uint64
	returned bool
}

// add copies the query, gives the copy a random ID and remembers it until done is called. returned reports whether the
// query had come back already.
func (s *sentSet) add(query []byte, end int, returned bool) (sent []byte, done func()) {
	sent = append(make([]byte, 0, len(query)), query...)
	binary.BigEndian.PutUint16(sent, uint16(rand.Uint32())) // ChaCha8, seeded by the operating system
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keys == nil {
		s.keys = make(map[sentKey]int)
		s.seed = maphash.MakeSeed()
	}
	key := s.key(sent, end, returned)
	s.keys[key]++
	return sent, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.keys[key]--; s.keys[key] == 0 {
			delete(s.keys, key)
		}
	}
}

// has reports whether the query waits for an upstream, and whether it had come back before that.
func (s *sentSet) has(query []byte, end int) (returned, loops bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.keys) == 0 {
		return false, false
	}
	loops = s.keys[s.key(query, end, true)] > 0
	return loops || s.keys[s.key(query, end, false)] > 0, loops
}

func (s *sentSet) key(m []byte, end int, returned bool) sentKey {
	return sentKey{binary.BigEndian.Uint16(m), maphash.Bytes(s.seed, m[headerLen:end]), returned}
}
