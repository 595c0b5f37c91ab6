import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.apache.rocketmq.common.message.*;
import org.apache.rocketmq.store.*;
import org.apache.rocketmq.store.config.FlushDiskType;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/**
 * The store of Apache RocketMQ on the command line, for tests/compat: {@code Driver write|read|config|deliver DIR LOG_BYTES
 * QUEUE_BYTES}.
 *
 * <p>{@code write} takes commands from its input, one a line (fields divided by tabs), and answers each with a line of
 * JSON; the end of the input is an orderly stop, {@code halt} is none. {@code read} lists every message of every queue
 * as RocketMQ reads it, then asks the index for all their keys. {@code config} shows what it understands of the tables
 * under config/, takes changes as {@code write} does, and writes them. {@code deliver}, with a number of milliseconds as
 * a last word, delivers delayed messages for so long. Bytes are hexadecimal.
 */
public final class Driver {
    private static final int INDEX_SLOTS = 100;
    private static final int INDEX_ENTRIES = 400;
    private static final HexFormat HEX = HexFormat.of();
    private static PrintStream out;

    private Driver() {}

    public static void main(String[] words) {
        try {
            run(words);
            System.exit(0); // RocketMQ leaves threads behind
        } catch (Throwable error) {
            error.printStackTrace();
            System.exit(1);
        }
    }

    private static void run(String[] words) throws Exception {
        out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        System.setOut(System.err); // whatever RocketMQ prints is none of our answers
        Path root = Path.of(words[1]);
        switch (words[0]) {
            case "write" -> {
                DefaultMessageStore store = open(root, words);
                write(store);
                store.shutdown();
            }
            case "read" -> {
                DefaultMessageStore store = open(root, words);
                read(store, root);
                store.shutdown();
            }
            case "deliver" -> {
                DefaultMessageStore store = open(root, words);
                Engine.deliver(store, Long.parseLong(words[4]));
                store.shutdown();
            }
            case "config" -> config(root.resolve("config"));
            default -> throw new IllegalArgumentException(words[0]);
        }
    }

    /** One line of the input: a name, then fields. */
    static final class Command {
        final String name;
        private final Map<String, String> fields = new LinkedHashMap<>();

        Command(String line) {
            String[] words = line.split("\t");
            name = words[0];
            for (String word : Arrays.asList(words).subList(1, words.length)) {
                int equals = word.indexOf('=');
                fields.put(word.substring(0, equals), word.substring(equals + 1));
            }
        }

        String get(String field) {
            return fields.get(field);
        }

        int number(String field, int otherwise) {
            return fields.containsKey(field) ? Integer.parseInt(get(field)) : otherwise;
        }

        SocketAddress host(String field) {
            String[] parts = fields.getOrDefault(field, "127.0.0.1 10911").split(" ");
            return new InetSocketAddress(parts[0], Integer.parseInt(parts[1]));
        }

        byte[] bytes(String field) {
            return HEX.parseHex(fields.getOrDefault(field, ""));
        }

        /** Fields named {@code p:NAME}. */
        Map<String, String> properties() {
            Map<String, String> found = new LinkedHashMap<>();
            fields.forEach((name, value) -> {
                if (name.startsWith("p:")) {
                    found.put(name.substring(2), value);
                }
            });
            return found;
        }
    }

    private static DefaultMessageStore open(Path root, String[] words) throws Exception {
        MessageStoreConfig config = new MessageStoreConfig();
        config.setStorePathRootDir(root.toString());
        config.setStorePathCommitLog(root.resolve("commitlog").toString());
        config.setMappedFileSizeCommitLog(Integer.parseInt(words[2]));
        config.setMappedFileSizeConsumeQueue(Integer.parseInt(words[3]));
        config.setMaxHashSlotNum(INDEX_SLOTS);
        config.setMaxIndexNum(INDEX_ENTRIES);
        config.setFlushDiskType(FlushDiskType.ASYNC_FLUSH);
        config.setHaListenPort(0);
        config.setDiskMaxUsedSpaceRatio(99);
        config.setCleanFileForciblyEnable(false);
        DefaultMessageStore store = Engine.make(config);
        if (!store.load()) {
            throw new IOException("RocketMQ cannot load " + root);
        }
        store.start();
        return store;
    }

    // --- write ---------------------------------------------------------------------------------------------------

    private static void write(DefaultMessageStore store) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            Command command = new Command(line);
            switch (command.name) {
                case "put" -> answer(store.putMessage(message(command)));
                case "batch" -> answer(store.putMessages(batch(command)));
                case "halt" -> Runtime.getRuntime().halt(9);
                default -> throw new IllegalArgumentException(line);
            }
        }
    }

    private static void answer(PutMessageResult result) {
        AppendMessageResult append = result.getAppendMessageResult();
        out.println(new Json().text("status", result.getPutMessageStatus().toString())
            .number("queue_offset", append == null ? -1 : append.getLogicsOffset())
            .number("log_offset", append == null ? -1 : append.getWroteOffset())
            .text("ids", append == null ? "" : append.getMsgId()));
    }

    private static MessageExtBrokerInner message(Command command) {
        MessageExtBrokerInner message = new MessageExtBrokerInner();
        message.setTopic(command.get("topic"));
        message.setQueueId(command.number("queue", 0));
        message.setBody(command.bytes("body"));
        message.setFlag(command.number("flag", 0));
        message.setSysFlag(command.number("sys", 0));
        message.setBornTimestamp(System.currentTimeMillis());
        message.setBornHost(command.host("born"));
        message.setStoreHost(command.host("store"));
        message.setReconsumeTimes(command.number("reconsume", 0));
        message.setPreparedTransactionOffset(command.number("prepared", 0));
        MessageAccessor.setProperties(message, command.properties());
        message.setPropertiesString(MessageDecoder.messageProperties2String(message.getProperties()));
        Engine.delay(message);
        return message;
    }

    /** A batch as a client sends it: bodies divided by commas, each with a key of its own. */
    private static MessageExtBatch batch(Command command) throws Exception {
        List<Message> messages = new ArrayList<>();
        for (String body : command.get("bodies").split(",")) {
            Message message = new Message(command.get("topic"), HEX.parseHex(body));
            message.setKeys("key-" + body);
            messages.add(message);
        }
        MessageBatch sent = MessageBatch.generateFromList(messages);
        for (Message message : sent) {
            MessageClientIDSetter.setUniqID(message);
        }
        MessageClientIDSetter.setUniqID(sent);
        MessageExtBatch batch = new MessageExtBatch();
        batch.setTopic(command.get("topic"));
        batch.setQueueId(command.number("queue", 0));
        batch.setBody(sent.encode());
        batch.setBornTimestamp(System.currentTimeMillis());
        batch.setBornHost(command.host("born"));
        batch.setStoreHost(command.host("store"));
        MessageAccessor.setProperties(batch, sent.getProperties());
        MessageAccessor.putProperty(batch, "CLUSTER", "compat");
        return batch;
    }

    // --- read ----------------------------------------------------------------------------------------------------

    private static void read(DefaultMessageStore store, Path root) throws Exception {
        Map<String, String> keys = new TreeMap<>(); // topic and key → topic
        for (Path topic : folders(root.resolve("consumequeue"))) {
            for (Path queue : folders(topic)) {
                readQueue(store, name(topic), Integer.parseInt(name(queue)), keys);
            }
        }
        keys.forEach((both, topic) -> query(store, topic, both.substring(topic.length() + 1)));
        out.println(new Json().text("kind", "end").number("min", store.getMinPhyOffset()).number(
            "max", store.getMaxPhyOffset()));
    }

    private static void readQueue(DefaultMessageStore store, String topic, int queue, Map<String, String> keys)
        throws Exception {
        long min = store.getMinOffsetInQueue(topic, queue);
        long max = store.getMaxOffsetInQueue(topic, queue);
        out.println(new Json().text("kind", "queue").text("topic", topic).number("queue", queue).number(
            "min", min).number("max", max));
        List<Long> tags = new ArrayList<>();
        MessageFilter everything = new MessageFilter() {
            @Override
            public boolean isMatchedByConsumeQueue(Long tagsCode, ConsumeQueueExt.CqExtUnit unit) {
                tags.add(tagsCode);
                return true;
            }

            @Override
            public boolean isMatchedByCommitLog(ByteBuffer buffer, Map<String, String> properties) {
                return true;
            }
        };
        for (long offset = min; offset < max; ) {
            tags.clear();
            GetMessageResult found = store.getMessage("compat", topic, queue, offset, 32, everything);
            if (found.getMessageCount() == 0) {
                throw new IOException(topic + " " + queue + " at " + offset + ": " + found.getStatus());
            }
            for (int i = 0; i < found.getMessageCount(); i++) {
                readMessage(found.getMessageBufferList().get(i), tags.get(i), keys);
            }
            offset = found.getNextBeginOffset();
            found.release();
        }
    }

    private static void readMessage(ByteBuffer record, long tagsCode, Map<String, String> keys) {
        byte[] raw = new byte[record.remaining()];
        record.duplicate().get(raw);
        MessageExt message = MessageDecoder.decode(record, true, true);
        out.println(new Json().text("kind", "message").text("topic", message.getTopic())
            .number("queue_id", message.getQueueId()).number("queue_offset", message.getQueueOffset())
            .number("log_offset", message.getCommitLogOffset()).number("size", message.getStoreSize())
            .number("flag", message.getFlag()).number("sys_flag", message.getSysFlag())
            .number("body_crc", message.getBodyCRC()).number("born_time_ms", message.getBornTimestamp())
            .number("store_time_ms", message.getStoreTimestamp())
            .number("reconsume_times", message.getReconsumeTimes())
            .number("prepared_offset", message.getPreparedTransactionOffset())
            .text("born_host", host(message.getBornHost())).text("store_host", host(message.getStoreHost()))
            .text("body", HEX.formatHex(message.getBody() == null ? new byte[0] : message.getBody()))
            .map("properties", message.getProperties() == null ? Map.of() : message.getProperties()).number("tags_code", tagsCode)
            .text("id", message instanceof MessageClientExt client ? client.getOffsetMsgId() : message.getMsgId())
            .text("raw", HEX.formatHex(raw)));
        Stream.concat(
                Stream.ofNullable(message.getProperty(MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX)),
                Stream.ofNullable(message.getKeys()).flatMap(all -> Stream.of(all.split(MessageConst.KEY_SEPARATOR))))
            .filter(key -> !key.isEmpty()).forEach(key -> keys.put(message.getTopic() + "#" + key, message.getTopic()));
    }

    private static void query(DefaultMessageStore store, String topic, String key) {
        QueryMessageResult found = store.queryMessage(topic, key, 64, 0, Long.MAX_VALUE);
        String offsets = found.getMessageBufferList().stream()
            .map(record -> Long.toString(MessageDecoder.decode(record, false).getCommitLogOffset()))
            .collect(Collectors.joining(","));
        found.release();
        out.println(new Json().text("kind", "query").text("topic", topic).text("key", key).text("offsets", offsets));
    }

    private static String host(SocketAddress address) {
        InetSocketAddress there = (InetSocketAddress) address;
        return HEX.formatHex(there.getAddress().getAddress()) + ":" + there.getPort();
    }

    private static List<Path> folders(Path path) throws IOException {
        if (!Files.isDirectory(path)) {
            return List.of();
        }
        try (Stream<Path> found = Files.list(path)) {
            return found.sorted().toList();
        }
    }

    private static String name(Path path) {
        return path.getFileName().toString();
    }

    // --- config --------------------------------------------------------------------------------------------------

    private static void config(Path folder) throws IOException {
        List<Table> tables = Engine.tables(folder);
        for (Table table : tables) {
            boolean loaded = table.load();
            out.println(new Json().text("kind", "table").text("loaded", Boolean.toString(loaded)).text(
                "file", name(Path.of(table.configFilePath()))).text("understood", table.encode(false)));
        }
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            Command command = new Command(line);
            if (tables.stream().noneMatch(table -> table.take(command))) {
                throw new IllegalArgumentException(line);
            }
        }
        tables.forEach(Table::persist);
    }

    /** One object on one line. */
    private static final class Json {
        private final StringBuilder fields = new StringBuilder();

        Json text(String name, String value) {
            return field(name, quoted(value));
        }

        Json number(String name, long value) {
            return field(name, Long.toString(value));
        }

        Json map(String name, Map<String, String> values) {
            return field(name, values.entrySet().stream()
                .map(entry -> quoted(entry.getKey()) + ":" + quoted(entry.getValue()))
                .collect(Collectors.joining(",", "{", "}")));
        }

        private Json field(String name, String json) {
            fields.append(fields.length() == 0 ? "" : ",").append(quoted(name)).append(':').append(json);
            return this;
        }

        private static String quoted(String text) {
            return text.chars()
                .mapToObj(c -> c < 0x20 || c > 0x7e || c == '"' || c == '\\' ? String.format("\\u%04x", c)
                    : String.valueOf((char) c))
                .collect(Collectors.joining("", "\"", "\""));
        }

        @Override
        public String toString() {
            return "{" + fields + "}";
        }
    }
}
