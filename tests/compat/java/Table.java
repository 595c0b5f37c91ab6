import java.nio.file.Path;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentMap;
import java.util.function.Consumer;
import java.util.function.Function;
import org.apache.rocketmq.common.ConfigManager;
import org.apache.rocketmq.common.TopicConfig;

/** One file of config/: read, changed and written by RocketMQ's own code, whose classes differ from version to version. */
final class Table extends ConfigManager {
    private final Path path;
    private final String word;
    private final Consumer<String> decode;
    private final Function<Boolean, String> encode;
    private final Consumer<Driver.Command> change;

    /** {@code word}: the driver's command that is for this table; {@code change} does what it says. */
    Table(
        Path path,
        String word,
        Consumer<String> decode,
        Function<Boolean, String> encode,
        Consumer<Driver.Command> change) {
        this.path = path;
        this.word = word;
        this.decode = decode;
        this.encode = encode;
        this.change = change;
    }

    @Override
    public String configFilePath() {
        return path.toString();
    }

    @Override
    public String encode() {
        return encode(false);
    }

    @Override
    public String encode(boolean pretty) {
        return encode.apply(pretty);
    }

    @Override
    public void decode(String json) {
        decode.accept(json);
    }

    /** Takes one command of the driver; false: it is not for this table. */
    boolean take(Driver.Command command) {
        boolean mine = command.name.equals(word);
        if (mine) {
            change.accept(command);
        }
        return mine;
    }

    // --- what the versions have in common of the tables' content ---

    static void putTopic(ConcurrentMap<String, TopicConfig> topics, Driver.Command command) {
        TopicConfig topic = new TopicConfig(
            command.get("name"), command.number("read", 4), command.number("write", 4), command.number("perm", 6));
        topic.setOrder(command.number("order", 0) == 1);
        topics.put(topic.getTopicName(), topic);
    }

    static void putOffset(ConcurrentMap<String, ConcurrentMap<Integer, Long>> offsets, Driver.Command command) {
        offsets.computeIfAbsent(command.get("topic") + "@" + command.get("group"), key -> new ConcurrentHashMap<>())
            .put(command.number("queue", 0), (long) command.number("offset", 0));
    }
}
